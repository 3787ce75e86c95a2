"""Digits with Hugging Face Accelerate.

    accelerate launch --num_processes 2 before.py
"""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()

x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
x, x_test, y, y_test = train_test_split(x, y, test_size=0.2, random_state=0)
train, test = TensorDataset(x, y), TensorDataset(x_test, y_test)
loader = DataLoader(train, batch_size=32, shuffle=True)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
criterion = nn.CrossEntropyLoss()
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for epoch in range(15):
    for images, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()

if accelerator.is_main_process:
    with torch.no_grad():
        images, labels = test[:]
        predictions = accelerator.unwrap_model(model)(images.to(accelerator.device)).argmax(1).cpu()
    print(f"accuracy {(predictions == labels).float().mean().item():.3f}")
accelerator.end_training()
