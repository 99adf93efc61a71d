"""How errors and warnings refer to a page of the documentation.

The documentation has no address yet, and a wheel does not contain it: messages name the title of a
page. Once there is a site, only this file needs its address.
"""


def page(title: str) -> str:
    return f'"{title}" in packax\'s documentation'
