"""A Hugging Face checkpoint that tests take apart and damage."""

import json
import shutil
from pathlib import Path

import numpy as np

from k3jax.checkpoint.report import Problems
from k3jax.checkpoint.shards import INDEX, NUMPY_DTYPES, read_header
from k3jax.config import K3Config


class Editable:
    """A Hugging Face checkpoint whose tensors are (dtype, shape, bytes) in a dict per file."""

    def __init__(self, directory):
        self.directory = directory
        self.files = {}
        for file in sorted(directory.glob("*.safetensors")):
            data = file.read_bytes()
            tensors = {}
            for name, tensor in read_header(file, Problems(directory)).items():
                values = np.frombuffer(
                    data,
                    NUMPY_DTYPES[tensor.dtype],
                    int(np.prod(tensor.shape)),
                    tensor.start,
                )
                tensors[name] = (tensor.dtype, values.reshape(tensor.shape).copy())
            self.files[file.name] = tensors

    @property
    def config(self):
        return K3Config.from_file(self.directory)

    @property
    def index(self):
        return json.loads((self.directory / INDEX).read_text())["weight_map"]

    def write_index(self, weight_map):
        (self.directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    def file_of(self, name):
        return next(file for file, tensors in self.files.items() if name in tensors)

    def values(self, name):
        return self.files[self.file_of(name)][name][1]

    def all(self):
        """Every tensor of every file."""
        return {name: each for tensors in self.files.values() for name, each in tensors.items()}

    def write(self, *, index=True):
        """Write all files, and an index that agrees with them."""
        for file, tensors in self.files.items():
            header, data = {}, b""
            for name, (dtype, values) in tensors.items():
                end = len(data) + values.nbytes
                header[name] = {
                    "dtype": dtype,
                    "shape": list(values.shape),
                    "data_offsets": [len(data), end],
                }
                data += values.tobytes()
            text = json.dumps(header).encode()
            text = len(text).to_bytes(8, "little") + text
            (self.directory / file).write_bytes(text + data)
        if index and (self.directory / INDEX).exists():
            files = self.files.items()
            self.write_index({name: file for file, tensors in files for name in tensors})


def editable_copy(source: Path, parent: Path) -> Editable:
    target = parent / source.name
    target.mkdir()
    for file in source.iterdir():
        if file.suffix != ".npz":
            shutil.copyfile(file, target / file.name)
    return Editable(target)
