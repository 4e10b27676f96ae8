"""Train with torchtitan in float16: start it with torchrun and the arguments of torchtitan's own train.py."""

from torchtitan.config import ConfigManager

from amp_core import PrecisionPlan
from amp_core.integrations.torchtitan import Trainer

config = ConfigManager().parse_args()
config.training.disable_cuda_graphs = True
config.parallelism.spmd_backend = "partial_dtensor"
trainer = Trainer(config, plan=PrecisionPlan.from_toml("plan.toml"), scaler={"growth_interval": 500})
trainer.train()
trainer.close()
