"""One convolution call: settings, selection of tiles, launch, record, and what is measured on disk."""
