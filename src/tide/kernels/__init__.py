"""Operations on the device that graphs are built with. Knows no model."""
