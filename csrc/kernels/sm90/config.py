"""Compile-time constants of a kernel, handed from function to function as one argument."""

from triton.experimental import gluon


class Constants:
    """Read as attributes: `config.QK_DIM`."""

    def __init__(self, named):
        self.__dict__.update({k: getattr(x, "value", x) for k, x in named.items()})

    def __eq__(self, other):
        return isinstance(other, Constants) and vars(self) == vars(other)

    def __hash__(self):
        return hash(tuple(vars(self).items()))

    def __repr__(self):
        return f"Constants({vars(self)})"

    def mangle(self):
        """Its part of a function's name."""
        return "_".join(str(int(x)) for x in vars(self).values())


@gluon.constexpr_function
def constants(**named):
    return Constants(named)
