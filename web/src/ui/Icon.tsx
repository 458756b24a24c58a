// Pictures of buttons, drawn: a sign of a font is an empty box where the font lacks it.
const PATHS = {
  plus: "M12 5v14M5 12h14",
  close: "M6 6l12 12M18 6L6 18",
  left: "M15 5l-7 7 7 7",
  right: "M9 5l7 7-7 7",
  pencil: "M4 20l1-5L16 4l4 4L9 19l-5 1zM14 6l4 4",
  contrast: "M12 3a9 9 0 1 0 0 18a9 9 0 1 0 0-18M12 3v18M12 8h6.5M12 12h9M12 16h6.5",
  sun: "M12 8a4 4 0 1 0 0 8a4 4 0 1 0 0-8M12 2v3M12 19v3M2 12h3M19 12h3M5 5l2 2M17 17l2 2M5 19l2-2M17 7l2-2",
  moon: "M20 14A8.5 8.5 0 1 1 10 4a7 7 0 0 0 10 10z",
};

/** A picture beside or in place of words; what it means is said by the button's label. */
export function Icon({ name }: { name: keyof typeof PATHS }) {
  return (
    <svg class="icon" viewBox="0 0 24 24" aria-hidden="true">
      <path d={PATHS[name]} />
    </svg>
  );
}
