"""A shadow of torch: layers written as Python code over tensors that have a size and no content.

core.py is the storage accounting and the autograd engine, ops.py the operations with what each saves. A model's layer
is then an ordinary function (forecast/layers/), and its memory follows from Python's own lifetimes, as in torch.
"""

from overspill.forecast.tape.core import Category, Memory, Node, Parameter, Selection, Tape, Tensor

__all__ = ["Category", "Memory", "Node", "Parameter", "Selection", "Tape", "Tensor"]
