"""A notebook whose cells train, run by nbclient."""
import nbclient
import nbformat

book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in (
    "import torch\nmodel = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(8)]).cuda()",
    "for step in range(3):\n    model(torch.randn(1024, 4096, device='cuda')).sum().backward()",
    "print(torch.cuda.max_memory_allocated())")])
nbclient.NotebookClient(book, timeout=120).execute()
print(book.cells[-1].outputs[0].text)
