"""Plan for hardware that need not be here: devices, estimates of step, cost and energy, alternatives. Pure."""
