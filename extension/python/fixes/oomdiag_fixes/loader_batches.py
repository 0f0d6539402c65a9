"""No fix: makes the worst batches that a program's own DataLoader can make, for `oomdiag fit --lengths loader`.

{"look": true} reports the lengths of the samples of each DataLoader that the program goes through, and changes nothing.
{"samples": [...]} fills each batch with one sample: of the n-th of those loaders, in the order in which they are first gone through, that
at this place of its data set. A batch of equal samples is as long as this one, whatever its collate function does.

The length of a sample is that of the batch that it makes alone: the first dimension of its tensors in which samples differ.
"""
import itertools
import time

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from . import report, report_applied, report_not_applied

MAX_SECONDS = 60  # for one loader


def _sizes(batch):
    """Of all tensors of a batch, in an order that is the same for each."""
    if isinstance(batch, Tensor):
        return tuple(batch.shape)
    if hasattr(batch, "items"):
        return tuple(size for _, value in sorted(batch.items(), key=lambda item: str(item[0])) for size in _sizes(value))
    if isinstance(batch, (list, tuple)):
        return tuple(size for value in batch for size in _sizes(value))
    return _sizes(list(vars(batch).values())) if hasattr(batch, "__dict__") else ()


def _samples_of(dataset):
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        yield from dataset
    else:
        yield from (dataset[place] for place in range(len(dataset)))


def _look(loader):
    """What is reported of a loader: for each length how many samples have it, and the place of one."""
    ends, sizes = time.monotonic() + MAX_SECONDS, []
    for sample in _samples_of(loader.dataset):
        sizes.append(_sizes(loader.collate_fn([sample])))
        if time.monotonic() > ends:
            break
    widths = {len(each) for each in sizes}
    differs = next((at for at in range(min(widths, default=0)) if len({each[at] for each in sizes}) > 1), None)
    found = {}  # length: [samples, place of the largest of them]
    for place, each in enumerate(sizes):
        length = 0 if differs is None or len(widths) > 1 else each[differs]
        known = found.setdefault(length, [0, place])
        known[0] += 1
        if each > sizes[known[1]]:
            known[1] = place
    total = len(loader.dataset) if hasattr(loader.dataset, "__len__") else len(sizes)
    return {"looked_at": len(sizes), "samples": total, "lengths": [[length, *of_it] for length, of_it in sorted(found.items())]}


def _batches(loader, place, plain):
    """As many as the loader would make, each of the sample at this place alone."""
    if loader.batch_size is None and loader.batch_sampler is None:
        yield from plain(loader)
        return
    batch_size = loader.batch_size or len(next(iter(loader.batch_sampler)))
    sample = next(itertools.islice(_samples_of(loader.dataset), place, None)) if isinstance(loader.dataset, IterableDataset) else loader.dataset[place]
    report_applied("loader_batches", [])
    for _ in range(_count_batches(loader, batch_size)):
        yield loader.collate_fn([sample] * batch_size)


def _count_batches(loader, batch_size):
    try:
        return len(loader)
    except TypeError:  # an IterableDataset without a length
        return max(1, sum(1 for _ in _samples_of(loader.dataset)) // batch_size)


def apply(settings):
    plain, datasets = DataLoader.__iter__, []

    def number_of(dataset):
        """In the order in which they are first gone through; a data set is kept, so that no other one takes its address."""
        for number, known in enumerate(datasets):
            if known is dataset:
                return number, False
        datasets.append(dataset)
        return len(datasets) - 1, True

    def look_and_go_through(self):
        if number_of(self.dataset)[1] and (self.batch_size is not None or self.batch_sampler is not None):
            try:
                report(loader_lengths=_look(self))
            except Exception as error:  # a collate function that wants several samples: the program goes on without the look
                report_not_applied("loader_batches", error)
        return plain(self)

    def go_through_worst(self):
        number, _ = number_of(self.dataset)
        samples = settings["samples"]
        return _batches(self, samples[number], plain) if number < len(samples) and samples[number] >= 0 else plain(self)

    DataLoader.__iter__ = look_and_go_through if settings.get("look") else go_through_worst
