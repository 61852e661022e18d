"""PyTorch's DeviceMesh internals, in one file: flattening mesh dimensions into one has no public name yet."""

from torch.distributed.device_mesh import DeviceMesh


def flatten_dims(mesh: DeviceMesh, dims: tuple[str, ...], name: str) -> DeviceMesh:
    """Returns the 1-D mesh over `dims` of `mesh`; creates its process group at the first call."""
    return mesh[dims]._flatten(name)
