"""A three-dimensional UNet of MONAI."""
import sys

import torch
from monai.losses import DiceCELoss
from monai.networks.nets import UNet

batch = int(sys.argv[1])
net = UNet(spatial_dims=3, in_channels=1, out_channels=4, channels=(32, 64, 128, 256), strides=(2, 2, 2), num_res_units=2).cuda()
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
criterion = DiceCELoss(to_onehot_y=True, softmax=True)
for step in range(2):
    labels = torch.randint(4, (batch, 1, 96, 96, 96), device="cuda")
    criterion(net(torch.randn(batch, 1, 96, 96, 96, device="cuda")), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
