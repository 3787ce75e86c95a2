"""Digits with torch.nn.DataParallel: one process, all GPUs of one host (without GPUs it is the plain model).

    python before.py
"""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
x, x_test, y, y_test = train_test_split(x, y, test_size=0.2, random_state=0)
train, test = TensorDataset(x, y), TensorDataset(x_test, y_test)
loader = DataLoader(train, batch_size=64, shuffle=True)

torch.manual_seed(0)
model = nn.DataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
criterion = nn.CrossEntropyLoss()

for epoch in range(15):
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()

with torch.no_grad():
    images, labels = test[:]
    accuracy = (model(images.to(device)).argmax(1).cpu() == labels).float().mean().item()
print(f"accuracy {accuracy:.3f}")
