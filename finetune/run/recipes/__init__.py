"""Each recipe's description: its groups of flags and its defaults. `NAME.py` here describes `recipes/NAME.py`."""

from finetune.run.flags.common import RunArguments
from finetune.run.flags.compression import CompressionArguments
from finetune.run.flags.guards import GuardArguments
from finetune.run.flags.profiling import ProfileArguments

TRAINER_GROUPS = (ProfileArguments, RunArguments, CompressionArguments, GuardArguments)  # of all but pipelines
