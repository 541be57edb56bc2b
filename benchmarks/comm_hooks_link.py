"""One rank of the measurement on a slow link: a step of a GPT-lite with every hook at every rate, interleaved.

benchmarks/comm_hooks.py starts it in each of two network namespaces; it sets the rate of its own side of the link.
"""

import argparse
import json
import os
import statistics
import subprocess
import time
from datetime import timedelta
from pathlib import Path

import psutil
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from finetune.models.gptlite import GPTLiteConfig, GPTLiteForCausalLM
from finetune.run.flags.compression import HOOKS, CompressionArguments
from finetune.training.compression import Compression, OneBitAdam

SHAPE = {"num_hidden_layers": 4, "hidden_size": 160, "num_attention_heads": 4, "max_position_embeddings": 64}
VOCABULARY, ROWS, TOKENS = 1024, 4, 64
WHOLE_STEPS = 2


class Peer:
    """A separate model, trained with one hook."""

    def __init__(self, hook: str) -> None:
        torch.manual_seed(0)
        model = GPTLiteForCausalLM(GPTLiteConfig(**SHAPE, vocab_size=VOCABULARY))
        self.parameters = sum(p.numel() for p in model.parameters())
        kind = OneBitAdam if hook == "onebit_adam" else torch.optim.AdamW
        self.optimizer = kind(model.parameters(), lr=1e-3)
        self.model = DistributedDataParallel(model, find_unused_parameters=hook == "powersgd")
        arguments = CompressionArguments(ddp_comm_hook=hook)
        if arguments.keeps_errors:
            arguments.comm_hook_start_steps = WHOLE_STEPS
        self.compression = Compression(arguments) if arguments.is_on else None
        if self.compression:
            self.compression.attach(self.model, self.optimizer, 100)

    def step(self, sends: bool = True) -> float:
        """Seconds from the batch to the new weights."""
        words = torch.randint(VOCABULARY, (ROWS, TOKENS))
        distributed.barrier()
        start = time.perf_counter()
        if sends:
            self.model(input_ids=words, labels=words).loss.backward()
        else:
            with self.model.no_sync():
                self.model(input_ids=words, labels=words).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        seconds = time.perf_counter() - start
        if self.compression and sends:
            self.compression.on_step_end()
        return seconds


def set_rate(interface: str, mbit: float) -> None:
    """Limit what this side sends; 0 for no limit."""
    subprocess.run(["tc", "qdisc", "del", "dev", interface, "root"], capture_output=True, check=False)
    if mbit:
        burst = max(32_000, round(mbit * 1e6 / 8 / 100))  # bytes sent at once: 10 ms at this rate
        rate = ["rate", f"{mbit:g}mbit", "burst", str(burst), "latency", "400ms"]
        subprocess.run(["tc", "qdisc", "add", "dev", interface, "root", "tbf", *rate], check=True)


def sent_bytes(interface: str) -> int:
    return int(psutil.net_io_counters(pernic=True)[interface].bytes_sent)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--interface", required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--rates", type=float, nargs="+", required=True, help="Mbit/s; 0 for no limit")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=300))
    peers = {hook: Peer(hook) for hook in HOOKS}
    for _ in range(WHOLE_STEPS + 2):
        for peer in peers.values():
            peer.step()
    for peer in peers.values():
        if peer.compression:
            peer.compression.figures("window")  # discard what the first steps sent
    plain = peers["none"]
    alone = statistics.median(plain.step(sends=False) for _ in range(max(5, options.steps)))
    cells = []
    for mbit in options.rates:
        set_rate(options.interface, mbit)
        distributed.barrier()
        steps = min(options.steps, 3) if 0 < mbit < 20 else options.steps  # plain DDP would take minutes
        seconds = {hook: [] for hook in HOOKS}
        on_wire = {hook: [] for hook in HOOKS}
        for _ in range(steps):
            for hook, peer in peers.items():  # interleaved, so that other programs slow all hooks alike
                before = sent_bytes(options.interface)
                seconds[hook].append(peer.step())
                on_wire[hook].append(sent_bytes(options.interface) - before)
        for hook, peer in peers.items():
            counted = (
                peer.compression.figures("window")["comm_bytes_per_step"]
                if peer.compression
                else plain.parameters * 4.0
            )
            cell = {"mbit": mbit, "hook": hook, "seconds": seconds[hook], "counted_bytes": counted}
            cells.append({**cell, "wire_bytes": statistics.median(on_wire[hook])})
        if distributed.get_rank() == 0:
            print(f"{mbit:g} Mbit/s", {h: round(statistics.median(s), 3) for h, s in seconds.items()}, flush=True)
    set_rate(options.interface, 0)
    if distributed.get_rank() == 0:
        found = {"parameters": plain.parameters, "seconds_without_exchange": alone, "cells": cells}
        options.result.write_text(json.dumps(found))
    distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
