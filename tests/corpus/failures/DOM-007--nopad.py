from _model import *

tok.pad_token = None
tok(["a", "a b"], padding=True)
