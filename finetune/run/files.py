"""Names of files in a run folder that more than one part reads, and what of it is pushed."""

from finetune.dsconfig.context import NVME_FOLDER

LOCK = "_lock"  # the Trainer pushes no name that begins with "_" to the hub (transformers 5.23, push_to_hub)
LABELS = "labels.json"  # what the adapter of a classifier tells apart
# An embedding model opens in sentence-transformers by these: its modules, how texts are cut, prompts, and pooling.
SENTENCE_MODULES, SENTENCE_SIZES = "modules.json", "sentence_bert_config.json"
SENTENCE_SETTINGS, SENTENCE_POOLING = "config_sentence_transformers.json", "1_Pooling/config.json"
SENTENCE_FILES = (SENTENCE_MODULES, SENTENCE_SIZES, SENTENCE_SETTINGS, SENTENCE_POOLING)
RUN_RECORD = "recipe.yaml"  # its presence says: this folder was written by a recipe
STATE_FILE = "trainer_state.json"  # in a checkpoint: its step, its epoch, what it has logged
IDENTITY = "run.json"  # in a run folder and in each checkpoint: of which run it is, and what decides its course
PIPELINE_RECORD = "pipeline.json"  # in a checkpoint of a pipeline
UNFINISHED = "unfinished-"  # begins the name of a folder that is being written
DELETING = "deleting-"  # and of one that is on its way out
REPLACED = "replaced-"  # and of one whose successor is being renamed, where that takes two steps
SUPERSEDED = "superseded-"  # and of a checkpoint that a run has gone back behind: nobody chooses it
LAST_WRITTEN = "README.md"  # the model card: a run that was cut off has none, or one that is older than its checkpoint

# What of a run folder is no model: the lock and the batches that the NaN guard has kept (`_*`), which are data,
# checkpoints under any of their names, what a kill has left, and swapped parameters. As `fnmatch` has it.
LEFT_OUT = ("_*", "*checkpoint-*", "unfinished-*", "final/*", f"{NVME_FOLDER}/*")


def by_hand(name: str = "NAME", folder: str = "FOLDER") -> str:
    """The command that pushes what `push` does; `hf upload` makes a public repository unless told, of all there is."""
    return f"hf upload {name} {folder} --private " + " ".join(f'--exclude "{pattern}"' for pattern in LEFT_OUT)
