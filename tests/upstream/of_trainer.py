"""What FinetuneMixin overrides of transformers' Trainer, and what it and its guards call there."""

from __future__ import annotations

from upstream.row import Row

TRAINER = "transformers.trainer:Trainer."
MIXIN, SAVING, EVALUATION = "training/trainer.py", "training/saving.py", "training/evaluation.py"
PREFERENCE, EMBEDDING, EXPERTS = "training/preference.py", "training/embedding.py", "training/experts.py"
IS_PUBLIC = "the method goes, or is no longer called from there: it is public"


def _public(where: str, name: str, signature: str, called_from: str, why: str) -> Row:
    callers = tuple(TRAINER + caller for caller in called_from.split())
    return Row(where, TRAINER + name, "override", why, "trainer.py", IS_PUBLIC, signature, callers)


PRIVATE = (
    Row(
        SAVING,
        f"{TRAINER}_save_checkpoint",
        "override",
        "a checkpoint is whole or not there; callbacks hear of a save only once it is made (on_save)",
        "trainer.py: writes file by file into the final folder",
        "a hook before a save and one after all its files, or a place that may be renamed",
        "self, model, trial",
        (f"{TRAINER}_maybe_log_save_evaluate",),
    ),
    Row(
        SAVING,
        f"{TRAINER}_save_optimizer_and_scheduler",
        "override",
        "the optimizer's states are copied, and written while the training goes on",
        "trainer.py: writes them by torch.save",
        "a place to hand over what is to be written",
        "self, output_dir",
        (f"{TRAINER}_save_checkpoint",),
    ),
    Row(
        SAVING,
        f"{TRAINER}_prepare_for_training",
        "override",
        "a checkpoint of another layout is loaded by name, once the engine is built",
        "trainer.py: has the engine load it, which fails for another layout",
        "a hook between building an engine and loading a checkpoint into it",
        "self, max_steps, train_dataloader, resume_from_checkpoint",
        (f"{TRAINER}_inner_training_loop",),
    ),
    Row(
        SAVING,
        f"{TRAINER}_get_output_dir",
        "override",
        "the save above goes into a folder that is renamed, and the Trainer finds no checkpoint there to delete",
        "trainer.py, _finalize_training: save_total_limit=1 with another best deletes the last checkpoint",
        "a public argument for where checkpoints go; rotation that can be turned off",
        "self, trial",
        (f"{TRAINER}_save_checkpoint", f"{TRAINER}_finalize_training"),
    ),
    Row(
        SAVING,
        f"{TRAINER}_load_best_model",
        "override",
        "the best checkpoint is verified before it is opened, and may be of another layout; no callback comes before",
        "trainer.py: opens what trainer_state.json names",
        "a hook before the best model is loaded",
        "self",
        (f"{TRAINER}_finalize_training",),
    ),
    Row(
        SAVING,
        f"{TRAINER}_save",
        "override",
        "a tied weight is saved once",
        "accelerate 1.15, accelerator.py, get_state_dict: copies the weights of each name below ZeRO-3",
        "copies that are tied as the weights are",
        "self, output_dir=, state_dict=",
        (f"{TRAINER}save_model",),
    ),
    Row(
        SAVING,
        f"{TRAINER}_load_from_checkpoint",
        "override",
        "weights that a checkpoint does not have are refused",
        "trainer.py: warns of them, and goes on with the model's own",
        "an error for them, or an argument that asks for one",
        "self, resume_from_checkpoint, model=",
        (f"{TRAINER}train",),
    ),
    Row(
        SAVING,
        f"{TRAINER}_load_callback_state",
        "override",
        "callbacks keep this run's arguments, and the losses come back also where the others are not asked for",
        "trainer.py: builds callbacks anew with the arguments of the old run; one that is new fails to save",
        "restoring in place",
        "self",
        (f"{TRAINER}_init_training_state",),
    ),
    Row(
        MIXIN,
        f"{TRAINER}_get_train_sampler",
        "override",
        "steps that do not depend on the number of processes; the public get_train_dataloader takes no sampler",
        "trainer.py: groups by length within a rank's share of a step",
        "a sampler as an argument of the Trainer",
        "self, train_dataset=",
        (f"{TRAINER}get_train_dataloader",),
    ),
    Row(
        MIXIN,
        f"{TRAINER}_get_grad_norm",
        "override",
        "the norm that all ranks share says whether a step may be taken; under DeepSpeed's stage 0 it is ours",
        "trainer.py: callbacks before the optimizer (on_pre_optimizer_step) are not told the norm",
        "the norm given to on_pre_optimizer_step",
        "self, model, grad_norm=",
        (f"{TRAINER}_run_epoch",),
    ),
    Row(
        MIXIN,
        f"{TRAINER}_prepare_inputs",
        "override",
        "labels that are numbers keep their digits, in training and in what metrics are given",
        "trainer.py, _prepare_input: casts every float to DeepSpeed's precision",
        "labels left as they are",
        "self, inputs",
        (f"{TRAINER}training_step", f"{TRAINER}prediction_step"),
    ),
)

CALLED = (
    Row(
        MIXIN,
        f"{TRAINER}_created_lr_scheduler",
        "write",
        "a schedule that the Trainer cannot build is made anew, as its own are, when training begins anew",
        "trainer.py: get_scheduler takes the names of SchedulerType alone",
        "a schedule of another name by a public hook",
        "",
        (f"{TRAINER}create_scheduler",),
    ),
    *(
        Row(
            "training/guards/trainer_adapter.py",
            f"{TRAINER}{name}",
            "call",
            "a rollback loads what a resumed run loads, in every layout",
            "trainer.py, _prepare_for_training",
            "a public method that loads a checkpoint into a Trainer that trains",
            signature,
            (f"{TRAINER}{caller}",),
        )
        for name, signature, caller in (
            ("_load_from_checkpoint", "self, resume_from_checkpoint, model=", "train"),
            ("_load_optimizer_and_scheduler", "self, checkpoint", "_prepare_for_training"),
            ("_load_scaler", "self, checkpoint", "_prepare_for_training"),
        )
    ),
)

PUBLIC = (
    _public(
        MIXIN,
        "train",
        "self, resume_from_checkpoint=, trial=, ignore_keys_for_eval=",
        "",
        "ranks are watched, and a checkpoint of another layout is moved first",
    ),
    _public(
        SAVING,
        "set_initial_training_values",
        "self, args, dataloader",
        "_inner_training_loop",
        "a run that is resumed at its end takes no step more",
    ),
    _public(SAVING, "init_hf_repo", "self, token=, private=", "__init__", "a public repository is not pushed to"),
    _public(
        SAVING,
        "create_model_card",
        "self, language=, license=, tags=, model_name=, finetuned_from=, tasks=, "
        "dataset_tags=, dataset=, dataset_args=",
        "push_to_hub",
        "the run's own card stays",
    ),
    _public(
        SAVING,
        "save_model",
        "self, output_dir=, _internal_call=",
        "_save_checkpoint",
        "the final model is whole",
    ),
    _public(
        MIXIN,
        "get_total_train_batch_size",
        "self, args",
        "set_initial_training_values",
        "ranks that share a text count once",
    ),
    _public(MIXIN, "create_optimizer", "self, model=", "_prepare_for_training", "keeps the norm"),
    _public(
        MIXIN,
        "create_scheduler",
        "self, num_training_steps, optimizer=",
        "_prepare_for_training",
        "a resumed run keeps what its flags make of the optimizer, before a checkpoint is loaded into it",
    ),
    _public(MIXIN, "get_train_dataloader", "self", "_inner_training_loop", "workers outlive a SIGTERM"),
    _public(
        EVALUATION,
        "get_eval_dataloader",
        "self, eval_dataset=",
        "evaluate",
        "accelerate keeps every loader that it has prepared, with its data set",
    ),
    _public(
        EVALUATION,
        "evaluate",
        "self, eval_dataset=, ignore_keys=, metric_key_prefix=",
        "_evaluate",
        "the last one in training is the run's last",
    ),
    _public(
        EVALUATION,
        "evaluation_loop",
        "self, dataloader, description, prediction_loss_only=, ignore_keys=, metric_key_prefix=",
        "evaluate predict",
        "evaluating draws nothing from what is learnt after it",
    ),
    _public(
        PREFERENCE,
        "get_batch_samples",
        "self, epoch_iterator, num_batches, device",
        "_run_epoch",
        "KTO's baseline is of a whole step",
    ),
    _public(
        PREFERENCE,
        "compute_loss",
        "self, model, inputs, return_outputs=, num_items_in_batch=",
        "training_step prediction_step",
        "a row is two texts",
    ),
    _public(
        PREFERENCE,
        "log",
        "self, logs, start_time=",
        "_maybe_log_save_evaluate _finalize_training evaluate",
        "with rewards and margins",
    ),
    _public(
        EMBEDDING,
        "get_batch_samples",
        "self, epoch_iterator, num_batches, device",
        "_run_epoch",
        "the negatives of a row are of a whole step",
    ),
    _public(
        EMBEDDING,
        "compute_loss",
        "self, model, inputs, return_outputs=, num_items_in_batch=",
        "training_step prediction_step",
        "a row is several texts, and its loss hangs on all rows of a step",
    ),
    _public(
        EXPERTS,
        "get_batch_samples",
        "self, epoch_iterator, num_batches, device",
        "_run_epoch",
        "the routers' loss needs the load of all micro-batches of a step",
    ),
    _public(
        EXPERTS,
        "training_step",
        "self, model, inputs, num_items_in_batch=",
        "_run_epoch",
        "a step begins with a look at its micro-batches, and the tokens of each expert are counted",
    ),
    _public(
        EXPERTS,
        "log",
        "self, logs, start_time=",
        "_maybe_log_save_evaluate _finalize_training evaluate",
        "with the routers' loss and the load of experts",
    ),
    _public(
        MIXIN,
        "get_batch_samples",
        "self, epoch_iterator, num_batches, device",
        "_run_epoch",
        "the guard sees a step's micro-batches",
    ),
    _public(
        MIXIN,
        "compute_loss",
        "self, model, inputs, return_outputs=, num_items_in_batch=",
        "training_step prediction_step",
        "a loss that is not finite shows in every gradient",
    ),
    _public(
        EVALUATION,
        "prediction_step",
        "self, model, inputs, prediction_loss_only, ignore_keys=",
        "evaluation_loop",
        "progress is told, and figures of rows stand for their logits",
    ),
    _public(
        MIXIN,
        "training_step",
        "self, model, inputs, num_items_in_batch=",
        "_run_epoch",
        "tokens and losses are counted",
    ),
    _public(MIXIN, "floating_point_ops", "self, inputs", "_run_epoch", "parameters are counted once"),
    _public(
        MIXIN,
        "log",
        "self, logs, start_time=",
        "_maybe_log_save_evaluate _finalize_training evaluate",
        "with the speed",
    ),
)

ROWS = (*PRIVATE, *CALLED, *PUBLIC)
