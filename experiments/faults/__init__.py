"""The fault campaign: twelve faults, each with a control that has none."""
