"""Which torch the tests run with. What is literal in them, figures and goldens, is of the default one."""
import importlib.metadata

VERSION = importlib.metadata.version("torch").split("+")[0]
DEFAULT = (2, 15)  # scripts/common.sh
MINOR = tuple(int(part) for part in VERSION.split(".")[:2])
