"""A hook of mkdocs: pages link to files beside docs/, which are no pages of the site. There they are named and not linked."""
import re


def on_page_markdown(markdown, **_):
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]+\)", r"\1", markdown)
