"""What `finetune plan` says of a run that has been: its recipe's flags on the machine that it ran on."""

from __future__ import annotations

from typing import Any

from finetune.dsconfig.context import flag_value
from finetune.errors import FinetuneError, first_line
from finetune.plan.machine import Machine, find_machine
from finetune.plan.plan import Plan, plan
from finetune.plan.request import Asked, job_of
from finetune.plan.run_model import with_kept_model
from finetune.report.run_folder import RunFolder, read_json


def planned(run: RunFolder) -> Plan | None:
    """None where no plan can be made, which is said in the run's notes."""
    if not run.recipe:
        return None
    try:
        machine = _machine(run)
        asked = Asked(_flags(run), run.ranks, run.ranks)
        job, _, _ = job_of(asked, machine)
        return plan(job, machine)
    except FinetuneError as error:
        run.notes.append(f"Nothing is planned beside it: {first_line(error)}")
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        RecursionError,
        ArithmeticError,
        OSError,
    ) as error:  # a recipe.yaml that no run has written
        run.notes.append(f"Nothing is planned beside it: recipe.yaml gives {first_line(error)}")
    return None


def _flags(run: RunFolder) -> dict[str, Any]:
    """Of its recipe; but the model is the one that it has kept."""
    flags = {name: flag_value(value) for name, value in run.recipe.items()}
    return with_kept_model(flags, run.folder, read_json(run.folder / "preprocessor_config.json", run.notes))


def _machine(run: RunFolder) -> Machine:
    gpus = run.environment.get("gpus")
    return find_machine(str(gpus[0]) if isinstance(gpus, list) and gpus else "cpu")
