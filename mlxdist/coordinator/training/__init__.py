"""What the loop calls: the optimizer, the schedule, the state and how it is saved, resumed and validated."""
