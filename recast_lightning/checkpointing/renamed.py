"""Keys of configurations and checkpoints that were renamed. Imports nothing: configurations are checked by it first."""

RENAMED = {
    "model.rollout_batch_size": "model.rollout.batch_size",
    "model.micro_batch_size": "model.rollout.micro_batch_size",
    "model.timestep_fraction": "model.rollout.timestep_fraction",
    "model.beta": "model.objective.beta",
    "model.kl_weight": "model.objective.kl_weight",
    "model.advantage_clip": "model.objective.advantage_clip",
    "model.advantage_std": "model.advantages.std",
    "model.aggregation": "model.advantages.aggregation",
    "model.num_workers": "model.scoring.num_workers",
    "model.reward_device": "model.scoring.device",
    "model.reward_offload": "model.scoring.offload",
    "model.failure_share": "model.scoring.failure_share",
    "model.learning_rate": "model.optimizer.learning_rate",
    "model.weight_decay": "model.optimizer.weight_decay",
    "model.warmup_steps": "model.optimizer.warmup_steps",
    "model.old_rate": "model.old_policy.rate",
    "model.old_flat": "model.old_policy.flat",
    "model.old_maximum": "model.old_policy.maximum",
}
