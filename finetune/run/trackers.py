"""The trackers that --report_to and --ds_monitor can name."""

from __future__ import annotations

import importlib.util
import netrc
import os
from collections.abc import Sequence

from finetune.errors import RequestError, or_meant

PACKAGES_OF_TRACKERS = ("tensorboard", "trackio")
# From transformers 5.23, integrations/integration_utils.py, INTEGRATION_TO_CALLBACK; a test compares them.
TRACKERS = """azure_ml clearml codecarbon comet_ml dagshub dvclive flyte kubeflow mlflow neptune swanlab tensorboard
trackio wandb""".split()


def check_trackers(reports: Sequence[str], flag: str = "report_to", source: str = "command line") -> None:
    """Raises RequestError, before anything is loaded, for a tracker that is unknown, not installed, or would stop the
    run to ask for a login."""

    def said(name: str) -> str:
        return f"--{flag} {name} ({source})"

    for name in reports:
        if flag == "report_to" and name not in (*TRACKERS, "all", "none"):
            hint = or_meant(name, TRACKERS, f" Give some of {', '.join(TRACKERS)}; all; or none.")
            raise RequestError(f"{said(name)}: transformers has no such tracker.{hint}")
    for name in PACKAGES_OF_TRACKERS:
        if name in reports and importlib.util.find_spec(name) is None:
            raise RequestError(f"{said(name)}: it is not installed. pip install {name}, or leave it out.")
    if {"wandb", "all"} & set(reports) and not (os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE")):
        try:
            logged_in = any("wandb" in host for host in netrc.netrc().hosts)
        except (OSError, netrc.NetrcParseError):
            logged_in = False
        if not logged_in:
            raise RequestError(
                f"{said('wandb')}, but nobody is logged in, and a run must not stop to ask. Run `wandb login`, or set "
                "WANDB_API_KEY, or set WANDB_MODE=offline and `wandb sync` later."
            )
