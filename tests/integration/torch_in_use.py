"""Which torch the tests run with. What is literal in them, figures and goldens, is of the default one."""
import importlib.metadata

VERSION = importlib.metadata.version("torch").split("+")[0]
DEFAULT = (2, 15)  # scripts/common.sh
MINOR = tuple(int(part) for part in VERSION.split(".")[:2])
CUDNN = next((tuple(int(part) for part in package.version.split(".")[:2]) for package in importlib.metadata.distributions()
              if (package.name or "").startswith("nvidia-cudnn-cu")), (0, 0))
TELLS_WORKSPACES = CUDNN >= (9, 8)  # on a virtual GPU; one before takes none there, and the report says so
