"""Private. Imports run one way: core < ops < context < masks, autodiff < attention, decode."""
