/** The logo, as in icon.svg. */
export function Logo() {
  return (
    <svg class="logo" viewBox="0 0 32 32" aria-hidden="true">
      <rect width="32" height="32" rx="8" />
      <path d="M9 8v16M9 24h6" />
      <path class="waves" d="M19 12a6 6 0 0 1 0 8M22.500 8.500a11 11 0 0 1 0 15" />
    </svg>
  );
}
