# Copyright 2026 The transformers_dflash2 authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Prompts of several kinds and languages, for a real pair."""

PROMPTS = (
    "What is gravity?",
    "Write a Python function that checks whether a number is prime.",
    "What is 17 plus 25? Explain each step.",
    "List ten animals that live in the sea.",
    "Tell me a short story about a lighthouse keeper.",
    "Erkläre mir auf Deutsch, was ein Computer ist.",
    "Qu'est-ce que la photosynthèse ?",
    "Write an SQL query that counts the orders of each customer.",
    "Give me three tips for better sleep.",
    "Translate to Spanish: The weather is nice today.",
    "A train travels 60 miles per hour for 2.5 hours. How far does it go?",
    "Write a polite email that declines a meeting.",
    "What is the difference between a list and a tuple in Python?",
    "Name the planets of the solar system in order.",
    "Write a JavaScript function that reverses a string.",
    "Who wrote Romeo and Juliet, and what is it about?",
)


def encode_chat(tokenizer, prompt: str):
    """
    A user's message as a target reads it.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): The target's, with a chat template.
        prompt (`str`): The message.

    Returns:
        [`~transformers.BatchEncoding`]: one row of ids and its mask.
    """
    chat = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)


__all__ = ["PROMPTS", "encode_chat"]
