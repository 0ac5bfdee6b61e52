"""Megatron ranks: one process per device, driven by the controller's commands (`services.trainer.core.commands`)."""
