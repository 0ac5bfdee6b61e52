"""Pure logic of the trainer: schedules, formulas, commands."""
