"""Names of files in a run folder that more than one part reads. Imports nothing."""

RUN_RECORD = "recipe.yaml"  # its presence says: this folder was written by a recipe
STATE_FILE = "trainer_state.json"  # in a checkpoint: its step, its epoch, what it has logged
PIPELINE_RECORD = "pipeline.json"  # in a checkpoint of a pipeline
UNFINISHED = "unfinished-"  # begins the name of a folder that is being written
DELETING = "deleting-"  # and of one that is on its way out
REPLACED = "replaced-"  # and of one whose successor is being renamed, where that takes two steps
SUPERSEDED = "superseded-"  # and of a checkpoint that a run has gone back behind: nobody chooses it
LAST_WRITTEN = "README.md"  # the model card: a run that was cut off has none, or one that is older than its checkpoint
