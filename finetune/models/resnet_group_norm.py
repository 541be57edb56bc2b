"""transformers' ResNet with group norm in place of batch norm (Wu and He, arXiv 1803.08494): each picture is normalized
by itself, so the loss is the same however a batch is spread over ranks and micro-batches.

It is a class of its own so that a saved model opens correctly: `from_pretrained` of a plain ResNet would load the
weights into batch norms without running statistics.
"""

from __future__ import annotations

from torch import nn
from transformers import AutoConfig, AutoModelForImageClassification, ResNetConfig, ResNetForImageClassification

CHANNELS_PER_GROUP = 16  # the paper's second best; its best, 32 groups, needs more channels than small models have


class GroupNormResNetConfig(ResNetConfig):
    """Has the fields of ResNetConfig."""

    model_type = "resnet_group_norm"


class GroupNormResNetForImageClassification(ResNetForImageClassification):
    config_class = GroupNormResNetConfig

    def __init__(self, config: GroupNormResNetConfig) -> None:
        super().__init__(config)
        for module in list(self.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.BatchNorm2d):
                    groups = max(1, child.num_features // CHANNELS_PER_GROUP)
                    setattr(module, name, nn.GroupNorm(groups, child.num_features, eps=child.eps))


AutoConfig.register(GroupNormResNetConfig.model_type, GroupNormResNetConfig, exist_ok=True)
AutoModelForImageClassification.register(GroupNormResNetConfig, GroupNormResNetForImageClassification, exist_ok=True)
# A saved folder includes this file, so it opens with `trust_remote_code=True` where the toolkit is not installed.
GroupNormResNetConfig.register_for_auto_class()
GroupNormResNetForImageClassification.register_for_auto_class("AutoModelForImageClassification")
