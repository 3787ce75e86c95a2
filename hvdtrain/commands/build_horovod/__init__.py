"""``python -m hvdtrain build``: build, install and check Horovod. Imports neither Horovod nor a framework."""
