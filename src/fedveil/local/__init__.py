"""Local training: models, losses, metrics, and the trainers that turn a cohort into one sum per silo."""
