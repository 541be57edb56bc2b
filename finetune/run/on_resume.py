"""What happens to a flag that has changed since the checkpoint was saved: a resumed run continues exactly, applies it
and says so, or refuses. Our flags state their class where they are defined (flags/), the Trainer's are listed below; a
test checks that docs/checkpoints.md has the table."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from finetune.run.flag import Flag

# Training does not depend on it: where and how a run is distributed, logged, evaluated, saved, watched.
GOES_ON = "goes on"
# Evaluation: reported, and refused only if it affects what is learned or kept (training/same_run.py).
EVALUATED = "evaluated"
# This run's value holds from the checkpoint's step on: optimizer, schedule, precision, the guard's response, compiled
# layers (whose dropout draws other random numbers).
APPLIED = "applied"
# Refused unless --resume_changed allow: the run could continue, but would take a different course.
VALUES = "value"
# Always refused: the checkpoint's state does not fit. The kind of a tokenizer from scratch is compared by value,
# because a resumed run uses its checkpoint's tokenizer and would not notice.
NEVER = "never"
# Compared by their effect, not by their text: another path to the same rows is no difference, nor is an explicit
# default. Other rows are refused unless --resume_changed allow.
ROWS = "rows"
# Compared likewise, and always refused: the model with its initial weights, its labels and its tokenizer.
MODEL = "model"

COMPARED = (APPLIED, VALUES, NEVER)  # by value

# `per_device_train_batch_size` and accumulation may change, because the global batch is kept (reshard/batch.py).
OF_TRAINER = {
    **dict.fromkeys(
        """
        output_dir deepspeed per_device_train_batch_size gradient_accumulation_steps per_device_eval_batch_size
        activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing
        gradient_checkpointing_kwargs use_liger_kernel liger_kernel_config use_cache torch_empty_cache_steps
        auto_find_batch_size logging_strategy logging_steps logging_first_step log_on_each_node
        logging_nan_inf_filter include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to
        run_name project trackio_space_id trackio_bucket_id trackio_static_space_id eval_strategy eval_steps
        eval_delay prediction_loss_only eval_on_start eval_do_concat_batches eval_use_gather_object
        eval_accumulation_steps include_for_metrics batch_eval_metrics bf16_full_eval fp16_full_eval
        save_only_model save_strategy save_steps save_on_each_node save_total_limit enable_jit_checkpoint
        push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
        load_best_model_at_end restore_callback_states_from_checkpoint use_cpu dataloader_num_workers
        dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
        dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names
        length_column_name ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph
        ddp_backend ddp_timeout fsdp fsdp_config debug skip_memory_metrics do_train do_eval do_predict
        """.split(),
        GOES_ON,
    ),
    **dict.fromkeys(
        """
        learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps weight_decay adam_beta1 adam_beta2
        adam_epsilon max_grad_norm max_steps num_train_epochs bf16 fp16 tf32 torch_compile torch_compile_backend
        torch_compile_mode
        """.split(),
        APPLIED,
    ),
    **dict.fromkeys(
        """
        seed data_seed train_sampling_strategy dataloader_drop_last ignore_data_skip full_determinism
        label_smoothing_factor neftune_noise_alpha average_tokens_across_devices accelerator_config
        """.split(),
        VALUES,
    ),
    **dict.fromkeys("optim optim_args optim_target_modules metric_for_best_model greater_is_better".split(), NEVER),
}

TABLE = (  # in docs/checkpoints.md: what happens, how, the class
    ("continues exactly", "training does not depend on it", GOES_ON),
    ("continues, and is reported", "validation rows; refused if they choose the best model or the rate", EVALUATED),
    ("applied, and reported", "this run's value, from the checkpoint's step on", APPLIED),
    ("refused", "unless `--resume_changed allow`", VALUES),
    ("refused", "if the prepared rows differ, unless `--resume_changed allow`", ROWS),
    ("refused", "if the model's config, initial weights, labels or tokenizer differ", MODEL),
    ("refused", "the checkpoint's state does not fit", NEVER),
)


def named(flags: Mapping[str, Flag], classes: Collection[str]) -> set[str]:
    """The names of the flags in `classes`."""
    return {name for name, flag in flags.items() if flag.on_resume in classes}


def table(flags: Iterable[Flag]) -> str:
    """The table in docs/checkpoints.md, in Markdown."""
    lines = ["| a changed value is | how | flags |", "|---|---|---|"]
    known = {flag.name: flag for flag in flags}
    for becomes, how, of in TABLE:
        lines.append(f"| {becomes} | {how} | {', '.join(f'`{name}`' for name in sorted(named(known, (of,))))} |")
    return "\n".join(lines)
