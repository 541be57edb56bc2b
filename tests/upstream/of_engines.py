"""DeepSpeed's and accelerate's insides: engines, the pipeline, files of checkpoints; torch's flight recorder."""

from __future__ import annotations

from upstream.row import Row

PIPE = "deepspeed.runtime.pipe.engine:PipelineEngine."
ZERO = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer."
PARTITION = "deepspeed.runtime.zero.partition_parameters:Init."
EXPERT_PARALLEL = "training/expert_parallel.py"
LOADING = "training/reshard/loading.py"

RECORDERS = (
    Row(
        "training/guards/flight.py",
        "torch._C._distributed_c10d:_dump_fr_trace_json",
        "call",
        "a warning of a hang names the collective, its size and who has not joined it",
        "torch/csrc/distributed/c10d/init.cpp: gloo's flight recorder; 2.6 and 2.7 have none",
        "a public function that gives a rank's last collectives",
    ),
    Row(
        "training/guards/flight.py",
        "torch._C._distributed_c10d:_dump_nccl_trace_json",
        "call",
        "as above, for NCCL, which has a recorder of its own",
        "torch/csrc/distributed/c10d/init.cpp: holds the interpreter's lock while it asks CUDA",
        "as above",
        only_if="torch.distributed:is_nccl_available",
    ),
)

ENGINE = (
    Row(
        LOADING,
        f"{ZERO}_lazy_init_hp_params_optimizer_state",
        "call",
        "states are put in place by `safe_set_full_optimizer_state` before the first step",
        "runtime/zero/stage_1_and_2.py, _optimizer_step: links states to weights only after the first step",
        "states that exist from the start",
        "self",
        (f"{ZERO}_optimizer_step",),
    ),
    Row(
        LOADING,
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.fp32_partitioned_groups_flat",
        "read",
        "as above: ZeRO-3 keeps the weights for whom there are states here, and not in the optimizer's groups",
        "runtime/zero/stage3.py, _clear_fp32_optimizer_param_groups",
        "as above",
    ),
    *(
        Row(
            LOADING,
            where + name,
            "write",
            "fp16's scale goes along to another layout",
            "runtime/zero/stage_1_and_2.py, and fp16/unfused_optimizer.py without ZeRO",
            "a public function that sets it",
        )
        for where, name in (
            (ZERO, "loss_scaler"),
            ("deepspeed.runtime.fp16.unfused_optimizer:FP16_UnfusedOptimizer.", "loss_scale_config"),
        )
    ),
    Row(
        "training/guards/nan_guard.py",
        f"{ZERO}overflow",
        "read",
        "whether the step was left out for gradients that are not finite",
        "runtime/engine.py, _take_model_step",
        "a public word for a step that was skipped, in fp32 and bf16 too",
        called_from=("deepspeed.runtime.engine:DeepSpeedEngine._take_model_step",),
    ),
    Row(
        "training/guards/trainer_adapter.py",
        "transformers.integrations.deepspeed:deepspeed_load_checkpoint",
        "call",
        "a rollback loads what a resumed run loads",
        "transformers/trainer.py, _prepare_for_training",
        "a public method that loads a checkpoint into a Trainer that trains",
        "deepspeed_engine, checkpoint_path, load_module_strict=",
        ("transformers.trainer:Trainer._prepare_for_training",),
    ),
    *(
        Row(where, PARTITION + name, "read", why, "runtime/zero/partition_parameters.py", "deepspeed.utils tells it")
        for where, name, why in (
            ("models/composite.py", "ds_numel", "the size of a weight that ZeRO-3 has sharded"),
            ("bench/meter.py", "ds_tensor", "the bytes of this rank's shards"),
            (LOADING, "ds_id", "whether ZeRO-3 has sharded a weight"),
            (LOADING, "ds_tensor", "the size of this rank's part, with its padding"),
        )
    ),
    Row(
        "training/resuming.py",
        "deepspeed.ops.adam.cpu_adam:DeepSpeedCPUAdam.ds_opt_adam",
        "call",
        "brings the powers of its betas to the digits of a run that was not cut",
        "ops/csrc/includes/cpu_adam.h, IncrementStep: keeps them in C++, where no checkpoint has them",
        "powers derived from the step",
        called_from=("deepspeed.ops.adam.cpu_adam:DeepSpeedCPUAdam.step",),
    ),
    Row(
        "training/resuming.py",
        "deepspeed.ops.adam.cpu_adam:DeepSpeedCPUAdam.opt_id",
        "read",
        "as above",
        "ops/adam/cpu_adam.py",
        "as above",
    ),
    Row(
        "training/checkpoints/deepspeed_writer.py",
        "deepspeed.runtime.engine:DeepSpeedEngine.checkpoint_engine",
        "write",
        "what DeepSpeed saves is copied, and written while the training goes on",
        "runtime/engine.py: chosen by the config alone, among its own (runtime/checkpoint_engine/utils.py)",
        "a writer that is handed to initialize()",
        called_from=("deepspeed.runtime.engine:DeepSpeedEngine.save_checkpoint",),
    ),
)

AUTOEP = (
    Row(
        "models/expert_parallel.py",
        "deepspeed.module_inject.auto_ep:AutoEP.ep_parser",
        "call",
        "a small copy gets the layers that the engine would put into the model",
        "module_inject/auto_ep.py: it is public, and is not documented",
        "initialize() refuses models that its layers do not compute",
        "self",
        ("deepspeed.runtime.engine:DeepSpeedEngine._configure_expert_parallel",),
    ),
    Row(
        "models/expert_parallel.py",
        "deepspeed.module_inject.auto_ep:AutoEP.replace_moe_layer",
        "call",
        "as above",
        "as above",
        "as above",
        "self, spec, ep_size, ep_rank",
    ),
    *(
        Row(
            where,
            f"deepspeed.module_inject.auto_ep_layer:AutoEPMoELayer.{name}",
            "read",
            why,
            "module_inject/auto_ep_layer.py: it is public, and is not documented",
            "a model of an engine that saves all experts under the model's names",
        )
        for where, name, why in (
            (EXPERT_PARALLEL, "ep_group", "the ranks whose experts are joined to save them"),
            (EXPERT_PARALLEL, "experts", "its weights w1, w2 and w3 are gathered and renamed"),
            (EXPERT_PARALLEL, "num_experts", "the shapes of all experts"),
            (
                "training/experts.py",
                "router",
                "its gate gives the logits of the router's loss, and it the chosen experts",
            ),
        )
    ),
)

PIPELINE = (
    Row(
        "training/pipeline/evaluation.py",
        f"{PIPE}reset_activation_shape",
        "call",
        "an evaluation's batches have a size of their own",
        "runtime/pipe/engine.py",
        "eval_batch does it",
        "self",
    ),
    Row(
        "training/pipeline/evaluation.py",
        f"{PIPE}eval_batch",
        "call",
        "figures are taken by the loss on the last stage, so nothing is reduced or broadcast",
        "runtime/pipe/engine.py",
        "it is public, and its arguments are not documented",
        "self, data_iter, return_logits=, compute_loss=, reduce_output=, bcast_loss=, num_micro_batches=",
    ),
    Row(
        "training/guards/pipeline_adapter.py",
        f"{PIPE}agg_train_loss",
        "read",
        "the loss of the step, on all stages",
        "runtime/pipe/engine.py, train_batch",
        "train_batch's return value, where the guard is asked",
    ),
    Row(
        "training/pipeline/trace.py",
        f"{PIPE}_INSTRUCTION_MAP",
        "write",
        "an instruction's begin and end, in the step that is drawn",
        "runtime/pipe/engine.py: no hook around it",
        "hooks around instructions",
        called_from=(f"{PIPE}_exec_schedule",),
    ),
    *(
        Row(
            "training/pipeline/trainer.py",
            f"deepspeed.runtime.pipe.topology:PipelineParallelGrid.{name}",
            "call",
            "which stage, and which pipeline, this rank is of",
            "runtime/pipe/topology.py",
            "it is public, and is not documented",
            "self",
        )
        for name in ("get_stage_id", "get_data_parallel_rank")
    ),
    Row(
        "training/pipeline/engine.py",
        "transformers.trainer:Trainer.get_decay_parameter_names",
        "call",
        "the Trainer's two groups without a Trainer: it looks at no self",
        "transformers/trainer.py",
        "a static method",
        "self, model",
    ),
    Row(
        "training/pipeline/trainer.py",
        "transformers.trainer_callback:CallbackHandler",
        "call",
        "the Trainer's callbacks around a loop that is not the Trainer's",
        "transformers/trainer_callback.py: internal, by its docstring",
        "a public loop",
        "callbacks, model, processing_class, optimizer, lr_scheduler",
    ),
)

ACCELERATE = (
    Row(
        "training/runtime.py",
        "accelerate.state:PartialState.distributed_type",
        "write",
        "FSDP shards CPU ranks, too",
        "state.py, AcceleratorState.__init__: drops the FSDP plugin for MULTI_CPU",
        "MULTI_CPU among the types that may become FSDP",
    ),
    Row(
        "training/trainer.py",
        "accelerate.data_loader:DataLoaderAdapter.base_dataloader",
        "read",
        "workers are given what outlives a SIGTERM",
        "data_loader.py: what stands around torch's DataLoader gives, and does not set, its attributes",
        "an argument of the Trainer for worker_init_fn",
    ),
)

ROWS = (*ENGINE, *AUTOEP, *PIPELINE, *ACCELERATE, *RECORDERS)
