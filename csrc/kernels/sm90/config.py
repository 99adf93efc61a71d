"""Compile-time constants of a kernel, passed between functions as one argument."""

from triton.experimental import gluon


class Constants:
    """Constants that are read as attributes: `config.QK_DIM`."""

    def __init__(self, named):
        self.__dict__.update(named)

    def __eq__(self, other):
        return isinstance(other, Constants) and vars(self) == vars(other)

    def __hash__(self):
        return hash(tuple(vars(self).items()))

    def __repr__(self):
        return f"Constants({vars(self)})"

    def mangle(self):
        """The part of a function's mangled name for these constants."""
        return "_".join(str(int(x)) for x in vars(self).values())


@gluon.constexpr_function
def constants(**named):
    return Constants(named)
