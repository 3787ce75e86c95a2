"""What ranks compute in: the type of each by its device, and the scale of a loss whose gradients are float16.

Pure: how a framework computes in a type is in each backend's ``amp``.
"""
