"""Segments CT scans with a three-dimensional U-Net in overlapping windows."""
import itertools

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import expected


def block(cin, cout):
    return nn.Sequential(nn.Conv3d(cin, cout, 3, padding=1), nn.InstanceNorm3d(cout), nn.LeakyReLU(0.01, inplace=True))


class UNet3D(nn.Module):
    def __init__(self, classes=14, base=16):
        super().__init__()
        self.e1 = block(1, base)
        self.e2 = block(base, base * 2)
        self.e3 = block(base * 2, base * 4)
        self.d2 = block(base * 6, base * 2)
        self.d1 = block(base * 3, base)
        self.head = nn.Conv3d(base, classes, 1)

    def forward(self, x):
        a = self.e1(x)
        b = self.e2(F.max_pool3d(a, 2))
        c = self.e3(F.max_pool3d(b, 2))
        b = self.d2(torch.cat([F.interpolate(c, scale_factor=2), b], 1))
        a = self.d1(torch.cat([F.interpolate(b, scale_factor=2), a], 1))
        return self.head(a)


def scan_starts(size, roi, overlap):
    step = int(roi * (1 - overlap))
    starts = list(range(0, size - roi + 1, step))
    if starts[-1] != size - roi:
        starts.append(size - roi)
    return starts


def stitch(merged, counts, outputs, positions, roi):
    for out, (z, y, x) in zip(outputs, positions):
        merged[0, :, z:z + roi, y:y + roi, x:x + roi] += out
        counts[0, :, z:z + roi, y:y + roi, x:x + roi] += 1


def sliding_window_inference(volume, roi, sw_batch, net, overlap=0.5, classes=14, fixed=False):
    spatial = volume.shape[2:]
    positions = list(itertools.product(*(scan_starts(s, roi, overlap) for s in spatial)))
    if fixed:
        merged = torch.zeros(1, classes, *spatial, device=volume.device)
        counts = torch.zeros(1, 1, *spatial, device=volume.device)
    outputs = []
    for i in range(0, len(positions), sw_batch):
        windows = torch.cat([volume[:, :, z:z + roi, y:y + roi, x:x + roi]
                             for z, y, x in positions[i:i + sw_batch]])
        if fixed:
            stitch(merged, counts, torch.softmax(net(windows), dim=1), positions[i:i + sw_batch], roi)
        else:
            outputs.append(torch.softmax(net(windows), dim=1))
    if fixed:
        return merged / counts
    outputs = torch.cat(outputs)

    merged = torch.zeros(1, outputs.shape[1], *spatial, device=volume.device)
    counts = torch.zeros(1, 1, *spatial, device=volume.device)
    stitch(merged, counts, outputs, positions, roi)
    return merged / counts


@torch.no_grad()
def segment(net, scans, fixed=False):
    net.eval()
    masks = []
    for scan in scans:
        prob = sliding_window_inference(scan.cuda(), roi=96, sw_batch=4, net=net, fixed=fixed)
        masks.append(prob.argmax(1).to(torch.uint8).cpu())
    return masks


def load_scans():
    for shape in ((160, 256, 256), (288, 416, 416)):
        yield torch.randn(1, 1, *shape)


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="Project-MONAI/MONAI#854", memory=11900)
def segment_ct(fixed=False):
    """The outputs of all windows, which overlap and have all 14 classes, lie in the list `outputs` on the GPU until they are stitched at
    the end. Cured by: Stitch each window as it comes, or keep the outputs of the windows on the CPU.
    """
    net = UNet3D().cuda()
    return len(segment(net, load_scans(), fixed))
