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
"""Shows what a drafter does.

```bash
python -m transformers_dflash2.trace --target HuggingFaceTB/SmolLM2-135M-Instruct \\
    --draft model_cards/smollm2-135m-dflash2 --chat "Why is the sky blue?" --html trace.html
```
"""

import argparse
import os
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .auto import AutoDraftModel
from .inspection import inspect


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m transformers_dflash2.trace",
        description="Generate with a drafter and show which of its tokens were kept.",
    )
    parser.add_argument("--target", required=True, help="folder or Hub id of the target")
    parser.add_argument("--draft", required=True, help="folder or Hub id of the drafter")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="text to continue")
    prompt.add_argument("--chat", help="message of a user; the chat template is applied")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--num-assistant-tokens", type=int, help="tokens to draft per round")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0, help="for sampling")
    parser.add_argument("--dtype", default="auto", help="of target and drafter")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--block", type=int, help="round whose candidates are shown, from 1")
    parser.add_argument("--html", metavar="FILE", help="write a page as well")
    options = parser.parse_args(arguments)

    tokenizer = AutoTokenizer.from_pretrained(options.target)
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=options.dtype).to(options.device).eval()
    draft = AutoDraftModel.from_pretrained(options.draft, dtype=target.dtype).to(options.device).eval()
    request = {"max_new_tokens": options.max_new_tokens, "do_sample": options.temperature > 0}
    if options.temperature > 0:
        torch.manual_seed(options.seed)
        request |= {"temperature": options.temperature}
    if options.num_assistant_tokens is not None:
        request["num_assistant_tokens"] = options.num_assistant_tokens
    text = options.prompt if options.chat is None else [{"role": "user", "content": options.chat}]
    trace = inspect(target, draft, text, tokenizer=tokenizer, **request)
    print(trace.to_text(color=sys.stdout.isatty() and "NO_COLOR" not in os.environ, block=options.block))
    if options.html is not None:
        trace.save_html(options.html, block=options.block)
        print(f"\nPage: {options.html}")


if __name__ == "__main__":
    main()


__all__ = ["main"]
