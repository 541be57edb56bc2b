"""Names of files in a run folder that several modules use, and what is pushed to the hub."""

from pathlib import Path

from finetune.dsconfig.context import NVME_FOLDER

LOCK = "_lock"  # the Trainer does not push names that begin with "_" to the hub (transformers 5.23, push_to_hub)
SUPERVISION = "_supervise"  # the folder of `finetune supervise`
LABELS = "labels.json"  # the classes of a classifier's adapter
TEXT_COLUMNS = "text_columns"  # in config.json and in LABELS: the columns that a text classifier was trained on
SETTLED = ("thresholds", TEXT_COLUMNS)  # entries of these files that belong to the trained weights
# sentence-transformers opens an embedding model by these: its modules, truncation, prompts, and pooling.
SENTENCE_MODULES, SENTENCE_SIZES = "modules.json", "sentence_bert_config.json"
SENTENCE_SETTINGS, SENTENCE_POOLING = "config_sentence_transformers.json", "1_Pooling/config.json"
SENTENCE_FILES = (SENTENCE_MODULES, SENTENCE_SIZES, SENTENCE_SETTINGS, SENTENCE_POOLING)
RUN_RECORD = "recipe.yaml"  # its presence shows that a recipe wrote this folder
STATE_FILE = "trainer_state.json"  # in a checkpoint: its step, its epoch, its log
FAILURE = "_failure.json"  # the error that ended the last start, if one did
IDENTITY = "run.json"  # in a run folder and in each checkpoint: which run it belongs to, and what determines its course
EXPERT_LOAD = "experts.json"  # the tokens of each expert of a mixture between the last two logs
EXPERT_PICTURE = "experts.png"
# Pictures that a run may have written by the time it writes its model card, and their captions there.
PICTURES = {
    "profile/parts.png": "Where a step's time went, by part and rank",
    "schedule.png": "A step of the pipeline, planned and measured",
    EXPERT_PICTURE: "The tokens of each expert between the last two logs",
}
PIPELINE_RECORD = "pipeline.json"  # in a checkpoint of a pipeline
UNFINISHED = "unfinished-"  # prefix of a folder that is being written
DELETING = "deleting-"  # prefix of a folder that is being deleted
REPLACED = "replaced-"  # prefix of a folder whose successor is being renamed, if that takes two steps
SUPERSEDED = "superseded-"  # prefix of a checkpoint from after the step that a run rolled back to; never resumed from
LAST_WRITTEN = "README.md"  # the model card: an interrupted run has none, or one that is older than its checkpoint

# Files in a run folder that are not the model: the lock and the batches that the NaN guard saved (`_*`), which are
# data, checkpoints under any name, leftovers of a kill, and swapped parameters. `fnmatch` patterns.
LEFT_OUT = ("_*", "*checkpoint-*", "unfinished-*", "final/*", f"{NVME_FOLDER}/*")


def by_hand(name: str = "NAME", folder: str = "FOLDER") -> str:
    """The command that uploads what `push` does; by default, `hf upload` makes a public repository of everything."""
    return f"hf upload {name} {folder} --private " + " ".join(f'--exclude "{pattern}"' for pattern in LEFT_OUT)


ADAPTER_CONFIG, GENERATION_CONFIG = "adapter_config.json", "generation_config.json"


def without_base(adapter: Path) -> str:
    """What to do about an adapter whose base model was not found."""
    return (
        f"This is the adapter's base model: write its folder or hub id into {adapter / ADAPTER_CONFIG}, as "
        f"base_model_name_or_path, or merge both: finetune export {adapter} OUT --merge_adapter --base_model FOLDER."
    )
