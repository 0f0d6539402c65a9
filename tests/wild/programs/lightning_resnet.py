"""ResNet-50 by Lightning, 16-mixed, with workers."""
import sys

import lightning
import torch
import torchvision


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torchvision.models.resnet50()

    def training_step(self, batch, _):
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


batch = int(sys.argv[1])
data = torchvision.datasets.FakeData(2 * batch, (3, 224, 224), 1000, torchvision.transforms.ToTensor())
trainer = lightning.Trainer(max_steps=2, precision="16-mixed", accelerator="gpu", devices=1, logger=False,
                            enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(Classifier(), torch.utils.data.DataLoader(data, batch, num_workers=1))
