//! The `strftime_now` of chat templates, in UTC.

use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
/// The first of January 1970 was a Thursday.
const DAYS: [&str; 7] =
    ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// Seconds since 1970.
pub(super) fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Formats a time (seconds since 1970, UTC) by the directives of Python's `strftime`; `%-d` is
/// `%d` without padding.
///
/// # Errors
/// Names a directive that is not known.
pub(super) fn strftime(format: &str, time_s: u64) -> Result<String, String> {
    let (days, second) = (time_s / 86_400, time_s % 86_400);
    let (year, month, day) = civil(days);
    let hour = second / 3600;
    let hour12 = if hour % 12 == 0 { 12 } else { hour % 12 };
    let month_name = MONTHS[month as usize - 1];
    let day_name = DAYS[(days % 7) as usize];
    let mut text = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        let mut directive = chars.next().unwrap_or('%');
        let is_bare = directive == '-';
        if is_bare {
            directive = chars.next().unwrap_or('-');
        }
        let mut number = |value: u64, width: usize| {
            let width = if is_bare { 0 } else { width };
            text.push_str(&format!("{value:0width$}"));
        };
        match directive {
            'Y' => number(year, 4),
            'y' => number(year % 100, 2),
            'm' => number(month, 2),
            'd' => number(day, 2),
            'j' => number(days - days_before(year) + 1, 3),
            'H' => number(hour, 2),
            'I' => number(hour12, 2),
            'M' => number(second / 60 % 60, 2),
            'S' => number(second % 60, 2),
            'B' => text.push_str(month_name),
            'b' => text.push_str(&month_name[..3]),
            'A' => text.push_str(day_name),
            'a' => text.push_str(&day_name[..3]),
            'p' => text.push_str(if hour < 12 { "AM" } else { "PM" }),
            'Z' => text.push_str("UTC"),
            '%' => text.push('%'),
            other => return Err(format!("strftime_now does not know %{other}")),
        }
    }
    Ok(text)
}

/// Year, month and day (from 1) of a day counted from 1970.
fn civil(days: u64) -> (u64, u64, u64) {
    let mut year = 1970 + days / 366;
    while days_before(year + 1) <= days {
        year += 1;
    }
    let mut day = days - days_before(year);
    let mut month = 1;
    while day >= month_days(year, month) {
        day -= month_days(year, month);
        month += 1;
    }
    (year, month, day + 1)
}

/// Days from 1970 to the start of `year`.
fn days_before(year: u64) -> u64 {
    let leaps = |year: u64| year / 4 - year / 100 + year / 400;
    (year - 1970) * 365 + leaps(year - 1) - leaps(1969)
}

fn month_days(year: u64, month: u64) -> u64 {
    match month {
        2 if days_before(year + 1) - days_before(year) == 366 => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

#[cfg(test)]
mod tests {
    use super::strftime;

    #[test]
    fn as_python_formats() {
        // 2024-02-29 13:05:09, a Thursday
        let time_s = 1_709_211_909;
        assert_eq!(strftime("%d %b %Y", time_s).unwrap(), "29 Feb 2024");
        assert_eq!(
            strftime("%A, %B %-d %y %H:%M:%S %I%p %j %%", time_s).unwrap(),
            "Thursday, February 29 24 13:05:09 01PM 060 %"
        );
        assert_eq!(strftime("%Y-%m-%d", 0).unwrap(), "1970-01-01");
        assert_eq!(strftime("%Y-%m-%d", 4_107_542_399).unwrap(), "2100-02-28");
        assert_eq!(strftime("%Y-%m-%d", 951_782_400).unwrap(), "2000-02-29");
        assert!(strftime("%Q", 0).unwrap_err().contains("%Q"));
    }
}
