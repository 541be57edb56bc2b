"""What becomes of a flag that is another than when the checkpoint was saved: a resumed run goes on exactly, applies it
and says so, or refuses. A flag of ours says its class where it is made (flags/), the Trainer's are below; a test holds
that docs/checkpoints.md has the table."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from finetune.run.flag import Flag

# Nothing of what is learnt depends on it: where and how a run is spread, logged, evaluated, saved, watched.
GOES_ON = "goes on"
# Evaluation: said, and refused only where it has a say in what is learnt or kept (training/same_run.py).
EVALUATED = "evaluated"
# From the checkpoint's step on it is as this run's flags say: optimizer, schedule, precision, the guard's answer,
# compiled layers (whose dropout draws other numbers).
APPLIED = "applied"
# Refused unless --resume_changed allow: the course of the run is another, though it can go on.
VALUES = "value"
# Refused whatever is said: the states of the checkpoint are of something else. The kind of a tokenizer from scratch is
# compared by value, for a resumed run takes its checkpoint's and would never look.
NEVER = "never"
# By what they come to, not by their words: another path to the same rows is no difference, nor is a default said.
# Rows are refused unless --resume_changed allow.
ROWS = "rows"
# And the model, with the weights that it begins from, its labels and its tokenizer, whatever is said.
MODEL = "model"

COMPARED = (APPLIED, VALUES, NEVER)  # by value

# `per_device_train_batch_size` and accumulation go on, for the global batch is kept (reshard/batch.py).
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

TABLE = (  # of docs/checkpoints.md: what becomes of it, how, the class
    ("goes on exactly", "nothing that is learnt depends on it", GOES_ON),
    ("goes on, and said", "validation rows; refused where they choose the best model or the rate", EVALUATED),
    ("applied, and said", "as this run's flags say, from the checkpoint's step on", APPLIED),
    ("refused", "`--resume_changed allow` takes it", VALUES),
    ("refused", "by the prepared rows; `--resume_changed allow` takes others", ROWS),
    ("refused", "by the model's config and first weights, its labels and tokenizer", MODEL),
    ("refused", "the checkpoint's states are of something else", NEVER),
)


def named(flags: Mapping[str, Flag], classes: Collection[str]) -> set[str]:
    """The names of those flags that are in `classes`."""
    return {name for name, flag in flags.items() if flag.on_resume in classes}


def table(flags: Iterable[Flag]) -> str:
    """The rows of docs/checkpoints.md, in Markdown."""
    lines = ["| another value is | how | flags |", "|---|---|---|"]
    known = {flag.name: flag for flag in flags}
    for becomes, how, of in TABLE:
        lines.append(f"| {becomes} | {how} | {', '.join(f'`{name}`' for name in sorted(named(known, (of,))))} |")
    return "\n".join(lines)
