"""What becomes of each flag that is another than when the checkpoint was saved: a resumed run goes on exactly, applies
it and says so, or refuses. docs/checkpoints.md has the table; a test holds that each flag of each recipe is in one."""

from __future__ import annotations

# Nothing of what is learnt depends on these: where and how a run is spread, logged, evaluated, saved, watched.
# `per_device_train_batch_size` and accumulation are here, for the global batch is kept (reshard/batch.py).
GOES_ON = frozenset(
    """
    output_dir config deepspeed deepspeed_config nvme_path disable_check resume resume_changed overwrite_output_dir
    per_device_train_batch_size gradient_accumulation_steps per_device_eval_batch_size
    early_stopping_patience activation_checkpoint_interval activation_checkpointing activation_checkpointing_kwargs
    gradient_checkpointing gradient_checkpointing_kwargs attn_implementation trust_remote_code loss_chunk_tokens
    pipeline_parallel_size partition_method schedule_step
    profile profile_first_step flops_profiler comms_logger ds_monitor
    hang_timeout stop_grace
    merge_adapter sample_prompt sample_tokens sample_temperature metrics
    test_file test_dir max_predict_samples preprocessing_num_workers data_timeout_seconds
    use_liger_kernel liger_kernel_config use_cache
    torch_empty_cache_steps auto_find_batch_size
    logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter
    include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name project
    trackio_space_id trackio_bucket_id trackio_static_space_id
    eval_strategy eval_steps eval_delay prediction_loss_only eval_on_start eval_do_concat_batches
    eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics bf16_full_eval fp16_full_eval
    save_only_model save_strategy save_steps save_on_each_node save_total_limit enable_jit_checkpoint
    push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
    load_best_model_at_end restore_callback_states_from_checkpoint
    use_cpu dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
    dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order
    remove_unused_columns label_names length_column_name
    ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout
    fsdp fsdp_config debug skip_memory_metrics do_train do_eval do_predict
    """.split()
)
# Evaluation: said, and refused only where it has a say in what is learnt or kept (training/course.py).
EVALUATED = frozenset("validation_file validation_dir max_eval_samples".split())
# From the checkpoint's step on they are as this run's flags say: optimizer, schedule, precision, the guard's answer,
# compiled layers (whose dropout draws other numbers).
APPLIED = frozenset(
    """
    learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps weight_decay adam_beta1 adam_beta2 adam_epsilon
    max_grad_norm max_steps num_train_epochs bf16 fp16 tf32 dtype on_nan nan_limit
    torch_compile torch_compile_backend torch_compile_mode
    """.split()
)
# Refused unless --resume_changed allow: the course of the run is another, though it can go on.
VALUES = frozenset(
    """
    seed data_seed group_by_length train_sampling_strategy dataloader_drop_last ignore_data_skip full_determinism
    crop_padding horizontal_flip class_weights label_smoothing_factor neftune_noise_alpha average_tokens_across_devices
    lora_alpha lora_dropout lora_use_rslora sync_batch_norm freeze_batch_norm accelerator_config
    """.split()
)
# Refused whatever is said: the states of the checkpoint are of something else. The kind of a tokenizer from scratch is
# compared by value, for a resumed run takes its checkpoint's and would never look.
NEVER = frozenset(
    """
    optim optim_args optim_target_modules use_peft lora_r lora_target_modules load_in_4bit
    lora_modules_to_save lora_use_dora
    ddp_comm_hook comm_hook_start_steps powersgd_rank metric_for_best_model greater_is_better
    tokenizer bpe_vocab_size
    """.split()
)
# By what they come to, not by their words: another path to the same rows is no difference, nor is a default said.
# Rows are refused unless --resume_changed allow.
ROWS = frozenset(
    """
    dataset_name dataset_config_name train_file train_dir cifar_dir
    encoding column_mapping text_column_name text_column_names label_column_name label_column_names
    tokens_column_name tags_column_name
    image_column_name image_size task streaming max_train_samples validation_fraction
    validation_split_percentage clean_line_breaks skip_bad_rows max_seq_length block_size packing document_mask
    chat_template train_on reasoning drop_duplicates
    """.split()
)
# And the model, with the weights that it begins from, its labels and its tokenizer, whatever is said.
MODEL = frozenset(
    """
    model_name_or_path model_revision model_type model_size config_overrides norm dropout resize_embeddings
    tokenizer_name
    """.split()
)
REFUSED = VALUES | NEVER | ROWS | MODEL
CLASSES = {"goes on exactly": GOES_ON, "goes on, and said": EVALUATED, "applied, and said": APPLIED, "refused": REFUSED}
COMPARED = APPLIED | VALUES | NEVER  # by value


def table() -> str:
    """The rows of docs/checkpoints.md, in Markdown."""
    kinds = (
        ("goes on exactly", "nothing that is learnt depends on it", GOES_ON),
        ("goes on, and said", "validation rows; refused where they choose the best model or the rate", EVALUATED),
        ("applied, and said", "as this run's flags say, from the checkpoint's step on", APPLIED),
        ("refused", "`--resume_changed allow` takes it", VALUES),
        ("refused", "by the prepared rows; `--resume_changed allow` takes others", ROWS),
        ("refused", "by the model's config and first weights, its labels and tokenizer", MODEL),
        ("refused", "the checkpoint's states are of something else", NEVER),
    )
    lines = ["| another value is | how | flags |", "|---|---|---|"]
    for name, how, flags in kinds:
        lines.append(f"| {name} | {how} | {', '.join(f'`{flag}`' for flag in sorted(flags))} |")
    return "\n".join(lines)
