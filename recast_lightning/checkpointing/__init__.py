"""What is written so that a run can be stopped anywhere: checkpoints, records, signals."""
