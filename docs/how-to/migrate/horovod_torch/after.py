"""The same script on hvdtrain: the import is the only change.

    mpirun -np 2 python after.py
"""

import hvdtrain.torch as hvd
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

hvd.init()
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank())
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
x, x_test, y, y_test = train_test_split(x, y, train_size=22 * 64, random_state=0)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

for epoch in range(5):
    for rows in torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch)).split(64):
        mine = rows[hvd.rank()::hvd.size()]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[mine].to(device)), y[mine].to(device))
        loss.backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()

if hvd.rank() == 0:
    with torch.no_grad():
        accuracy = (model(x_test.to(device)).argmax(1).cpu() == y_test).float().mean().item()
    print(f"accuracy {accuracy:.3f}")
    torch.save(model.state_dict(), "digits.pt")
