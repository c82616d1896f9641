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
"""Times block attention on a CUDA device, against the bytes it has to move and against the host's SDPA.

Every call of a timed pass reads buffers of its own, as the layers of a model do, so nothing is served by the L2 cache
that a model would have to fetch; the pass is replayed from a CUDA graph. Results are checked against the float64
reference first. `--tune` times other launch parameters than the table's.

    python benchmarks/block_attention.py
    python benchmarks/block_attention.py --tune --lengths 512 32768
"""

import argparse
import itertools
import json
import statistics

import torch

from transformers_dflash2.kernels.block_attention import (
    BlockAttentionLaunch,
    block_attention_launch,
    block_attention_reference,
    block_attention_triton,
)


# All buffers of a pass together exceed the L2 cache (60 MB on an H200) several times.
PASS_BYTES = 512 * 2**20
HALF_RELATIVE_RMS = 5e-3


def make_inputs(options, length):
    """`(layers of (query, key, value), lengths)`: enough layers for one pass over `PASS_BYTES`."""
    dtype = getattr(torch, options.dtype)
    columns = options.capacity or -(-(length + options.block) // 512) * 512
    visible = length + options.block if options.window is None else min(length, options.window - 1) + options.block
    read = options.batch * options.kv_heads * visible * options.head_dim * 2 * dtype.itemsize
    layers = max(4, min(128, PASS_BYTES // read))
    shapes = (options.q_heads, options.block), (options.kv_heads, columns), (options.kv_heads, columns)
    inputs = [
        [
            torch.randn(options.batch, heads, rows, options.head_dim, device="cuda", dtype=dtype)
            for heads, rows in shapes
        ]
        for _ in range(layers)
    ]
    return inputs, torch.full((options.batch,), length, device="cuda"), read


def seconds_per_call(call, inputs, repeats=50):
    """Median over replays of a graph that calls once per set of inputs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(*inputs[0])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for tensors in inputs:
            call(*tensors)
    times = []
    for _ in range(repeats + 5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(inputs))
    return statistics.median(times[5:])


def check(options, inputs, lengths, launch):
    query, key, value = inputs[0]
    kwargs = {"scale": options.head_dim**-0.5, "is_causal": True, "window": options.window}
    output = block_attention_triton(query, key, value, lengths, **kwargs, launch=launch).double()
    exact = block_attention_reference(query.double(), key.double(), value.double(), lengths, **kwargs)
    error = float((output - exact).norm() / exact.norm())
    if not error < HALF_RELATIVE_RMS:
        raise SystemExit(f"{launch} is wrong: relative error {error:.1e} at length {int(lengths[0])}")


def candidates(chosen):
    """Launch parameters around the chosen ones."""
    grid = itertools.product(
        {chosen.block_columns // 2, chosen.block_columns, chosen.block_columns * 2},
        sorted({max(1, round(chosen.splits * factor)) for factor in (0.25, 0.5, 0.75, 1, 1.5)}),
        (4, 8),
        (2, 3, 4),
    )
    for block_columns, splits, num_warps, num_stages in grid:
        if block_columns >= 16 and splits <= 128:
            yield BlockAttentionLaunch(chosen.block_rows, block_columns, splits, num_warps, num_stages)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192, 32768])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--block", type=int, default=8)
    parser.add_argument("--q-heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--capacity", type=int, help="columns of the buffers; by default the length and a little")
    parser.add_argument("--window", type=int)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tune", action="store_true", help="time other launch parameters too")
    parser.add_argument("--json", help="write the results here")
    options = parser.parse_args()

    scale = options.head_dim**-0.5
    results = []
    copied = torch.empty(2**30, dtype=torch.int8, device="cuda")
    rate = 2 * copied.numel() / seconds_per_call(lambda source: source.clone(), [[copied]])
    print(f"{torch.cuda.get_device_name()}, device-to-device copy {rate / 1e12:.2f} TB/s")
    for length in options.lengths:
        inputs, lengths, read = make_inputs(options, length)
        chosen = block_attention_launch(inputs[0][0], inputs[0][1], window=options.window)
        mask = torch.arange(inputs[0][1].shape[2], device="cuda") < length + options.block
        mask = mask.expand(options.batch, 1, options.block, -1)
        launches = [chosen, *(launch for launch in candidates(chosen) if options.tune and launch != chosen)]
        rows = []
        for launch in launches:

            def call(query, key, value, launch=launch, lengths=lengths):
                options_of_call = {"scale": scale, "is_causal": True, "window": options.window, "launch": launch}
                block_attention_triton(query, key, value, lengths, **options_of_call)

            try:
                check(options, inputs, lengths, launch)
                rows.append((seconds_per_call(call, inputs, 20 if options.tune else 50), launch))
            except Exception as error:
                # Too much shared memory for this device, mostly.
                print(f"  {launch}: {type(error).__name__}: {str(error)[:80]}")
        group = options.q_heads // options.kv_heads

        def host(query, key, value, mask=mask, group=group):
            # As the host calls it with a mask: heads repeated, whole capacity.
            key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
            torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)

        sdpa = seconds_per_call(host, inputs)
        seconds = next(time for time, launch in rows if launch == chosen)
        print(
            f"length {length:6d}: {seconds * 1e6:7.1f} us, {read / seconds / 1e12:.2f} TB/s "
            f"({read / seconds / rate:.0%} of copy), sdpa {sdpa * 1e6:7.1f} us, {chosen}"
        )
        for time, launch in sorted(rows)[:5] if options.tune else ():
            print(f"    {time * 1e6:7.1f} us  {tuple(launch)}")
        results.append(
            {"length": length, "seconds": seconds, "sdpa_seconds": sdpa, "bytes": read, "launch": chosen._asdict()}
            | (
                {"tuned": [{"seconds": time, **launch._asdict()} for time, launch in sorted(rows)]}
                if options.tune
                else {}
            )
        )
        del inputs
    if options.json:
        record = {"device": torch.cuda.get_device_name(), "copy_bytes_per_second": rate, **vars(options)}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({**record, "torch": torch.__version__, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
