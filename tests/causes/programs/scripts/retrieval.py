"""Finds the most similar images of each image of a data base by their global descriptors."""
import torch

from expected import expected

device = "cuda"


def get_descriptors(n, dim=256):
    d = torch.randn(n, dim)
    return d / d.norm(dim=1, keepdim=True)


def pairs_from_score(scores, num_select, first=0):
    rows = torch.arange(len(scores))
    scores[rows, first + rows] = float("-inf")  # not with itself
    topk = torch.topk(scores, num_select, dim=1)
    return topk.indices.cpu()


@expected("all_pairs", fix="split|chunk", thread="cvg/Hierarchical-Localization#338", memory=4096)
def retrieval(fixed=False, num_matched=20, num_images=40000):
    db_desc = get_descriptors(num_images)
    query_desc = db_desc
    if fixed:
        db_gpu = db_desc.to(device)
        indices = []
        for start in range(0, num_images, 2000):
            sim = torch.einsum("id,jd->ij", query_desc[start:start + 2000].to(device), db_gpu)
            indices.append(pairs_from_score(sim, num_matched, start))
        indices = torch.cat(indices)
    else:
        sim = torch.einsum("id,jd->ij", query_desc.to(device), db_desc.to(device))
        indices = pairs_from_score(sim, num_matched)
    return [(i, int(j)) for i in range(0, num_images, 1000) for j in indices[i]]
