"""What the machine under a rank is and does: memory, processor, GPU, versions, and how much of its peak a run uses."""
