# Not built here: checked for syntax only. Copy it to a repository of yours as packages/py_hvdtrain/package.py, set
# `git`, and run: spack install py-hvdtrain +torch
# ruff: noqa: F403, F405
from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage


class PyHvdtrain(PythonPackage):
    """Train PyTorch and TensorFlow models on all ranks of an MPI job, of equal or different speed."""

    git = "ssh://git@git.example.org/hvdtrain.git"

    license("Apache-2.0")

    version("main", branch="main")

    variant("torch", default=True, description="Train PyTorch models")
    variant("tensorflow", default=False, description="Train Keras models on TensorFlow")
    variant("horovod", default=True, description="Exchange gradients by Horovod, too; without it by MPI alone")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("py-numpy@1.26:", type=("build", "run"))
    depends_on("py-jsonargparse@4.45: +signatures", type=("build", "run"))
    depends_on("py-pyyaml@6:", type=("build", "run"))
    depends_on("py-rich@13:", type=("build", "run"))
    depends_on("py-safetensors@0.5:", type=("build", "run"))
    depends_on("py-psutil@5.9:", type=("build", "run"))
    depends_on("py-mpi4py@4.1", type=("build", "run"))
    depends_on("py-cloudpickle@3:", type=("build", "run"))
    depends_on("py-clustershell@1.9:", type=("build", "run"))
    depends_on("mpi", type="run")

    depends_on("py-torch@2.6:2", type=("build", "run"), when="+torch")
    depends_on("py-tensorflow@2.18:2", type=("build", "run"), when="+tensorflow")
    depends_on("py-keras@3.14:3", type=("build", "run"), when="+tensorflow")
    depends_on("py-horovod@0.28.1 controllers=mpi", type="run", when="+horovod")
    depends_on("py-horovod frameworks=pytorch", type="run", when="+horovod+torch~tensorflow")
    depends_on("py-horovod frameworks=tensorflow,keras", type="run", when="+horovod~torch+tensorflow")
    depends_on("py-horovod frameworks=pytorch,tensorflow,keras", type="run", when="+horovod+torch+tensorflow")

    import_modules = ["hvdtrain", "hvdtrain.commands", "hvdtrain.cluster"]
