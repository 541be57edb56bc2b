"""Pushing to the Hugging Face hub: checks before training, and errors that lose no work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, get_token

from finetune.errors import RequestError, RunError, first_line
from finetune.run.files import LEFT_OUT, by_hand
from finetune.run.run import Run


def check_hub(run: Run) -> None:
    """Before a run that will be pushed, check for a login with write access. Only rank 0 calls it.

    The token comes only from HF_TOKEN or the hub's login. Raises RequestError.
    """
    if not run.value("push_to_hub"):
        return
    said = run.said("push_to_hub")
    if run.value("hub_strategy") not in (None, "end"):
        # At each save the Trainer would copy a checkpoint's weights file by file over those of the run folder, and its
        # unredacted training arguments with them (transformers 5.23, Trainer._push_from_checkpoint).
        raise RequestError(
            f"{run.said('hub_strategy')}: a run is pushed once, at its end, with its card. "
            f"Leave the flag out; to push a checkpoint: {by_hand(folder='FOLDER/checkpoint-N')}."
        )
    if constants.HF_HUB_OFFLINE:
        raise RequestError(f"{said}, but HF_HUB_OFFLINE is set. Unset it, or push later: {by_hand()}.")
    if not get_token():
        raise RequestError(f"{said}, but nobody is logged in. Run `hf auth login`, or set HF_TOKEN.")
    with explained_hub_errors(said):
        role = HfApi().whoami().get("auth", {}).get("accessToken", {}).get("role")
    if role == "read":
        raise RequestError(f"{said}, but the token is read-only. Create one with write access, and log in with it.")


def open_repo(trainer: Any, create: Any) -> None:
    """The Trainer's `init_hf_repo` with readable errors; refuses an existing public repository unless the user asked
    for a public one."""
    name = trainer.args.hub_model_id or Path(trainer.args.output_dir).absolute().name
    with explained_hub_errors(f"--hub_model_id {name}"):
        create()
        is_public = not HfApi().model_info(trainer.hub_model_id).private
    if is_public and trainer.args.hub_private_repo:
        raise RequestError(
            f"--hub_model_id {trainer.hub_model_id}: already exists and is public. Set --hub_private_repo False "
            "to push to it, or give another name."
        )


@contextmanager
def explained_hub_errors(flag: str) -> Iterator[None]:
    """Turn errors of the hub or the network into a RequestError, before training."""
    try:
        yield
    except Exception as error:  # only hub calls run inside, and their HTTP library changes from release to release
        raise RequestError(
            f"{flag}: {first_line(error)}. Nothing was trained. Fix it (`finetune doctor` says whether the hub can be "
            f"reached), or leave --push_to_hub out and push later: {by_hand()}."
        ) from error


def push(trainer: Any) -> str:
    """Push the run folder with its model card, and return a line that says so ("" on ranks that do not push). Every
    rank must call it. Raises RunError on failure, with the run saved. The Trainer's own push would include files of the
    run folder that are not part of the model (transformers 5.23, Trainer.push_to_hub)."""
    args = trainer.args
    if not args.do_train:
        trainer.save_model()
    if not trainer.is_world_process_zero():
        return ""
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    about = {"repo_id": trainer.hub_model_id, "revision": args.hub_revision, "commit_message": "End of training"}
    try:
        HfApi().upload_folder(folder_path=args.output_dir, ignore_patterns=list(LEFT_OUT), **about)
    except Exception as error:  # see explained_hub_errors
        raise RunError(
            f"the run is done and saved in {args.output_dir}, but pushing it failed: {first_line(error)}. "
            f"To try again: {by_hand(trainer.hub_model_id, args.output_dir)}"
        ) from error
    return f"pushed to {trainer.hub_model_id}"
