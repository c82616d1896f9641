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
"""`python -m transformers_dflash2.benchmark`: decoding methods side by side, as one table and one JSON record.

| module | holds |
| --- | --- |
| `synthetic` | models of a named shape, with an acceptance that their weights alone bring about |
| `contestants` | one entry per decoding method |
| `phases` | where the time of a round goes |
| `measure` | timing, bytes, memory, versions |
| `report` | the table and the plot |
"""

__all__ = []
