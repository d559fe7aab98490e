"""A file whose disk takes nothing, until there is room again."""

import io


class Full(io.StringIO):
    full = True

    def write(self, text: str) -> int:
        if self.full:
            raise OSError("No space left on device")
        return super().write(text)
