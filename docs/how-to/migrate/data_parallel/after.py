"""The same training with hvdtrain: one process for each GPU, on one host or on several.

    mpirun -np 2 python after.py
"""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import TensorDataset

from hvdtrain import Config, Trainer
from hvdtrain.config import Named

x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
x, x_test, y, y_test = train_test_split(x, y, test_size=0.2, random_state=0)
train, test = TensorDataset(x, y), TensorDataset(x_test, y_test)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

# DataParallel cut 64 samples over the GPUs of a host; global_batch is cut over all ranks.
config = Config(
    epochs=15,
    global_batch=64,
    optimizer=Named("SGD", {"momentum": 0.9}),
    lr=0.1,
    loss=Named("cross_entropy"),
)
Trainer(config).fit(model, (train, test))  # the table at its end has the test accuracy
